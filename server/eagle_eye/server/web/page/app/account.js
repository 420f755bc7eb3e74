// Who is signed in, and whether they may act.

import { h } from "preact";
import { link, useLive } from "./live.js";

const MAY = /** @type {const} */ ({ read: "may look", operate: "may act", admin: "administrator" });

/** The person's name and what they may do; nothing on a server that asks nobody who they are. */
export function Account() {
  useLive("link", "incident");
  const me = link.me;
  if (!me || me.who === "local") return null;
  const may = MAY[/** @type {keyof typeof MAY} */ (me.scope)] ?? me.scope;
  const why = me.person
    ? `${me.person} is in no group that may act here (sign_in.operate_groups).`
    : "The token has scope read; to act here, use one with scope operate.";
  return h(
    "span",
    { class: "account", title: me.scope === "read" ? why : undefined },
    h("span", { class: "person" }, me.person || "token"),
    h("span", { class: "quiet" }, may),
  );
}
