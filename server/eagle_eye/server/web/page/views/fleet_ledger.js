// What would have been done and was right or wrong, in one line and the newest few; the whole is a view of its own.

import { h } from "preact";
import { link as connection, useLive } from "../app/live.js";
import { Empty, Reading, Section } from "../app/parts.js";
import { useResource } from "../app/resource.js";
import { link } from "../app/router.js";
import { ClaimTable, precisionWords } from "./ledger.js";

const EVERY_MS = 60_000; // it changes by hours

export function LedgerGlance() {
  useLive("link");
  const ledger = useResource("api/v1/ledger?limit=5", {
    every_ms: EVERY_MS,
    settle_ms: 2000,
    concerns: (kind) => kind === "action",
  });
  const { data } = /** @type {import("../app/resource.js").Resource<import("../api").Ledger>} */ (ledger);
  if (connection.fleet && connection.fleet.policy_mode === "act" && data?.items.length === 0) return null;
  return h(
    Section,
    { title: "Ledger", id: "ledger", aside: h("a", { href: link("ledger") }, "The whole ledger") },
    h(Reading, { resource: ledger, what: "the ledger" }),
    data &&
      (data.items.length === 0
        ? h(Empty, null, "Nothing yet. What policy would have done is kept here and compared with what happened later.")
        : [h("p", { class: "quiet lead" }, precisionWords(data.total)), h(ClaimTable, { claims: data.items, label: "The newest claims" })]),
  );
}
