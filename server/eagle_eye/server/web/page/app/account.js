// Who is signed in, whether they may act, and the way out; and how the page is found again after the provider's.

import { h } from "preact";
import { useRef, useState } from "preact/hooks";
import { send } from "./api.js";
import { closing, useClosing } from "./closing.js";
import { link, run, useLive } from "./live.js";
import { notify } from "./verbs.js";

const MAY = /** @type {const} */ ({ read: "may only look", operate: "may act", admin: "administrator" });
const PLACE = "place"; // where somebody was who left to sign in

/** Notes where the page is: its place is no part of what the provider sends back. */
export const leave = () => sessionStorage.setItem(PLACE, location.hash);

/** Goes to where somebody was who left to sign in. */
export function comeBack() {
  const place = sessionStorage.getItem(PLACE);
  sessionStorage.removeItem(PLACE);
  if (place && !location.hash) history.replaceState(null, "", place);
}

/** @param {string} target */
async function signOut(target) {
  try {
    await send("POST", target);
    void run();
  } catch (error) {
    notify(`Sign out: ${error instanceof Error ? error.message : String(error)}`, "bad");
  }
}

/** The person's name and what they may do; nothing on a server that asks nobody who they are. */
export function Account() {
  useLive("link", "incident");
  const [open, setOpen] = useState(false);
  const box = useRef(/** @type {HTMLElement | null} */ (null));
  useClosing(box, open, () => setOpen(false));
  const me = link.me;
  if (!me || me.who === "local") return null;
  const may = MAY[/** @type {keyof typeof MAY} */ (me.scope)] ?? me.scope;
  const why = me.person
    ? `${me.person} is in no group that may act here (sign_in.operate_groups).`
    : "The token has scope read; to act here, use one with scope operate.";
  return h(
    "details",
    { class: "account in-bar", ...closing(box, open, setOpen) },
    h("summary", null, h("span", { class: "person" }, me.person || "token"), h("span", { class: "quiet may" }, may)),
    h(
      "div",
      { class: "bar-box" },
      h("p", null, me.person ? `Signed in as ${me.person}: ` : "With a token: ", h("b", null, may), "."),
      me.scope === "read" && h("p", { class: "quiet" }, why),
      me.owners_only && h("p", { class: "quiet" }, "You see your own jobs and those of your groups (sign_in.jobs_visible)."),
      me.session_ends && [
        h("button", { type: "button", class: "small", onClick: () => void signOut("api/v1/sign-out") }, "Sign out"),
        h("button", { type: "button", class: "small", title: "Ends your sessions in every browser", onClick: () => void signOut("api/v1/sessions/end") }, "Sign out everywhere"),
      ],
    ),
  );
}
