// Which view the address asks for: "#/jobs/NAME" and so on.

import { useEffect, useState } from "preact/hooks";

/** @typedef {{view: string, name: string | null, query: URLSearchParams}} Route */

/** @param {string} hash @returns {Route} */
export function parse(hash) {
  const [path = "", query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [view = "", ...rest] = path.split("/");
  let name = null;
  try {
    if (rest.length > 0) name = decodeURIComponent(rest.join("/"));
  } catch {
    name = rest.join("/");
  }
  return { view: view || "fleet", name: name || null, query: new URLSearchParams(query) };
}

/** The address of a view. @param {"fleet" | "jobs" | "incidents" | "nodes" | "ledger" | "trust" | "subscriptions"} view @param {string} [name] */
export function link(view, name) {
  if (view === "fleet" && name === undefined) return "#/";
  return name === undefined ? `#/${view}` : `#/${view}/${encodeURIComponent(name)}`;
}

/**
 * The address of a list with these filters; those that are empty are left out.
 * @param {"jobs" | "incidents" | "nodes" | "ledger"} view @param {Record<string, string>} filters
 */
export function filtered(view, filters) {
  const query = new URLSearchParams(Object.entries(filters).filter(([, value]) => value !== "")).toString();
  return `#/${view}${query ? `?${query}` : ""}`;
}

/** @returns {Route} */
export function useRoute() {
  const [hash, setHash] = useState(location.hash);
  useEffect(() => {
    const changed = () => setHash(location.hash);
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return parse(hash);
}
