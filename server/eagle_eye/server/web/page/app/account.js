// Who is signed in, whether they may act, and the way out; and how the page is found again after the provider's.

import { h } from "preact";
import { send } from "./api.js";
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

/** The person's name; opened, what they may do and the way out. Nothing on a server that asks nobody who they are. */
export function Account() {
  useLive("link", "incident");
  const me = link.me;
  if (!me || me.who === "local") return null;
  const may = MAY[/** @type {keyof typeof MAY} */ (me.scope)] ?? me.scope;
  const why = me.person
    ? `${me.person} is in no group that may act here (sign_in.operate_groups).`
    : "The token has scope read; to act here, use one with scope operate.";
  const name = [h("span", { class: "person" }, me.person || "token"), h("span", { class: "quiet" }, ` ${may}`)];
  if (me.scope !== "read" && !me.session_ends) return h("span", { class: "account" }, name);
  return h(
    "details",
    { class: "menu account" },
    h("summary", null, name),
    h(
      "div",
      { class: "menu-box" },
      me.scope === "read" && h("p", null, why),
      me.session_ends && [
        h("button", { type: "button", onClick: () => void signOut("api/v1/sign-out") }, "Sign out"),
        h("button", { type: "button", title: "Ends your sessions in every browser", onClick: () => void signOut("api/v1/sessions/end") }, "Sign out everywhere"),
      ],
    ),
  );
}
