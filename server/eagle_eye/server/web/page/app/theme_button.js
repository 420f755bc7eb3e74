// Light, dark, or as the system says.

import { h } from "preact";
import { useState } from "preact/hooks";

const NEXT = /** @type {const} */ ({ system: "dark", dark: "light", light: "system" });

export function ThemeButton() {
  const chosen = document.documentElement.dataset["theme"];
  const [theme, setTheme] = useState(
    /** @type {keyof typeof NEXT} */ (chosen === "dark" || chosen === "light" ? chosen : "system"),
  );
  const turn = () => {
    const next = NEXT[theme];
    if (next === "system") {
      localStorage.removeItem("theme");
      delete document.documentElement.dataset["theme"];
    } else {
      localStorage.setItem("theme", next);
      document.documentElement.dataset["theme"] = next;
    }
    // What is drawn on a canvas has to be drawn anew.
    dispatchEvent(new Event("themechange"));
    setTheme(next);
  };
  return h(
    "button",
    { type: "button", class: "small plain theme", onClick: turn, title: "Light, dark, or as the system says", "aria-label": `Theme: ${theme}` },
    h("span", { class: "sign", "aria-hidden": "true" }, "◐"),
    h("span", { class: "said" }, theme),
  );
}

/**
 * Calls `draw` when the page's colours change.
 * @param {() => void} draw
 * @returns {() => void} what ends it
 */
export function onTheme(draw) {
  const system = matchMedia("(prefers-color-scheme: dark)");
  addEventListener("themechange", draw);
  system.addEventListener("change", draw);
  return () => {
    removeEventListener("themechange", draw);
    system.removeEventListener("change", draw);
  };
}

/**
 * The present colours of custom properties, for canvases: "--bad" → "rgb(…)".
 * @template {string} N
 * @param {readonly N[]} names
 * @returns {Record<N, string>}
 */
export function colours(names) {
  const probe = document.createElement("span");
  document.body.append(probe);
  const found = /** @type {Record<N, string>} */ ({});
  for (const name of names) {
    probe.style.color = `var(${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}
