// Closes what was opened over the page, as people expect it: by Escape, or once they click or go elsewhere.

import { useEffect } from "preact/hooks";

/**
 * Calls `close` at Escape inside `box`, and when a click or the focus is outside it, while it is `open`.
 * @param {{current: HTMLElement | null}} box
 * @param {boolean} open
 * @param {() => void} close
 */
export function useClosing(box, open, close) {
  useEffect(() => {
    if (!open) return undefined;
    const outside = (/** @type {Event} */ event) => {
      if (event.target instanceof Node && !box.current?.contains(event.target)) close();
    };
    const escape = (/** @type {KeyboardEvent} */ event) => {
      if (event.key !== "Escape") return;
      close();
      /** @type {HTMLElement | null | undefined} */ (box.current?.querySelector("button, summary"))?.focus();
    };
    addEventListener("pointerdown", outside);
    addEventListener("focusin", outside);
    addEventListener("keydown", escape);
    return () => {
      removeEventListener("pointerdown", outside);
      removeEventListener("focusin", outside);
      removeEventListener("keydown", escape);
    };
  }, [open]);
}

/** What is behind a summary in the bar: `open` and what its `details` needs. @param {{current: HTMLElement | null}} box @param {boolean} open @param {(open: boolean) => void} setOpen */
export function closing(box, open, setOpen) {
  return {
    ref: box,
    open,
    onToggle: (/** @type {Event} */ event) => setOpen(/** @type {HTMLDetailsElement} */ (event.currentTarget).open),
  };
}
