// What surrounds every view: title, navigation, the server's health, the connection, the sign-in.

import { h } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { Account, leave } from "./account.js";
import { setToken, token } from "./api.js";
import { useClosing } from "./closing.js";
import { Health } from "./health.js";
import { link as connection, run, useLive } from "./live.js";
import { link, useRoute } from "./router.js";
import { Standby } from "./standby.js";
import { ThemeButton } from "./theme_button.js";
import { zone } from "./times.js";
import { Notices } from "./verbs.js";
import { VIEWS } from "./views.js";

const TABS = /** @type {const} */ ([
  ["fleet", "Fleet"],
  ["incidents", "Incidents"],
  ["jobs", "Jobs"],
  ["nodes", "Nodes"],
  ["ledger", "Ledger"],
  ["trust", "Trust in steps"],
  ["subscriptions", "Subscriptions"],
]);

const OF_ALL_JOBS = new Set(["trust", "subscriptions"]); // not for people who see their own jobs alone

export function Shell() {
  useLive("link");
  const route = useRoute();
  const main = useRef(/** @type {HTMLElement | null} */ (null));
  const found = VIEWS[route.view];
  const title = found ? found.title(route.name) : "No such page";
  const first = useRef(true);

  useEffect(() => {
    document.title = `${title} · Eagle Eye`;
    if (!first.current) {
      scrollTo(0, 0);
      main.current?.focus({ preventScroll: true });
    }
    first.current = false;
  }, [route.view, route.name]);

  const signIn = connection.state === "sign_in";
  const tabs = TABS.filter(([view]) => !(connection.me?.owners_only && OF_ALL_JOBS.has(view)));
  return [
    h(
      "header",
      { class: "bar" },
      h("a", { class: "brand", href: "#/", "aria-label": "Eagle Eye, fleet" }, "Eagle Eye"),
      h(Navigation, { tabs, view: route.view, place: location.hash }),
      h(Health, {}),
      h(Account, {}),
      h(ThemeButton, {}),
    ),
    h(Standby, {}),
    h(Notices, {}),
    h(
      "main",
      { id: "main", tabIndex: -1, ref: main },
      signIn
        ? h(SignInForm, {})
        : found
          ? h(found.view, { name: route.name, query: route.query, key: `${route.view}/${route.name}` })
          : h(NoSuchPage, { view: route.view }),
    ),
    h("footer", { class: "zone quiet" }, timesSaid(zone(new Date()))),
  ];
}

/** @param {string} here the reader's zone */
const timesSaid = (here) => `Times are in ${here}${here === "UTC" ? "" : "; hover over one for UTC"}.`;

/** The views as links; on a narrow screen behind a button. @param {{tabs: (typeof TABS)[number][], view: string, place: string}} props */
function Navigation({ tabs, view, place }) {
  const [open, setOpen] = useState(false);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useEffect(() => setOpen(false), [place]);
  useClosing(box, open, () => setOpen(false));
  const here = tabs.find(([one]) => one === view)?.[1] ?? "Views";
  return h(
    "nav",
    { "aria-label": "Views", ref: box },
    h(
      "button",
      { type: "button", class: "plain views-button", "aria-expanded": open, "aria-controls": "views", "aria-label": `Views: ${here}`, onClick: () => setOpen(!open) },
      h("span", { "aria-hidden": "true" }, "☰"),
      h("span", { class: "here" }, here),
    ),
    h(
      "div",
      { class: `views ${open ? "open" : ""}`, id: "views" },
      tabs.map(([one, words]) => h("a", { key: one, href: link(one), "aria-current": one === view ? "page" : undefined }, words)),
    ),
  );
}

/** @param {{view: string}} props */
const NoSuchPage = ({ view }) => [
  h("h1", null, "No such page"),
  h("p", null, `Nothing is called “${view}” here. The address may be mistyped; these are the pages:`),
  h("ul", { class: "pages" }, TABS.map(([one, words]) => h("li", { key: one }, h("a", { href: link(one) }, words)))),
];

/** Asks for a token; it stays in this tab alone, until the tab is closed. */
function SignInForm() {
  const [text, setText] = useState("");
  const refused = token() !== null && !connection.detail;
  return h(
    "form",
    {
      class: "sign-in",
      onSubmit: (/** @type {Event} */ event) => {
        event.preventDefault();
        setToken(text.trim());
        void run();
      },
    },
    h("h1", null, "Sign in"),
    connection.hasProvider && [
      h("a", { class: "button", href: "api/v1/sign-in/start", onClick: leave }, "Sign in with your site's account"),
      h("p", { class: "quiet" }, "Or with a token:"),
    ],
    !connection.hasProvider && h("p", null, "This server wants a token with scope read; with scope operate you can also act here."),
    connection.detail && h("p", { class: "trouble", role: "alert" }, connection.detail),
    refused && h("p", { class: "trouble", role: "alert" }, "The token is not accepted: it may be mistyped, revoked or expired."),
    h(
      "label",
      { class: "field" },
      "Token",
      h("input", {
        type: "password",
        autoComplete: "off",
        spellcheck: false,
        required: true,
        placeholder: "ee_…",
        value: text,
        onInput: (/** @type {Event} */ event) => setText(/** @type {HTMLInputElement} */ (event.target).value),
      }),
    ),
    h("button", { type: "submit", class: connection.hasProvider ? "" : "primary" }, "Sign in"),
  );
}
