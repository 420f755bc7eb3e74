// Every view, by the first word of its address. A view is a component that gets the address's name and query.

import { FleetView } from "../views/fleet.js";
import { IncidentView } from "../views/incident.js";
import { JobView } from "../views/job.js";
import { LedgerView } from "../views/ledger.js";
import { NodeView } from "../views/node.js";
import { SubscriptionsView } from "../views/subscriptions.js";
import { TrustView } from "../views/trust.js";

/**
 * @typedef {{name: string | null, query: URLSearchParams}} ViewProps `name`: what follows the second slash, decoded
 * @typedef {{title: (name: string | null) => string, view: import("preact").ComponentType<ViewProps>}} View
 */

/** @type {Record<string, View>} */
export const VIEWS = {
  fleet: { title: () => "Fleet", view: FleetView },
  incidents: { title: (name) => (name ? `Incident ${name}` : "Incidents"), view: IncidentView },
  jobs: { title: (name) => (name ? `Job ${name}` : "Jobs"), view: JobView },
  nodes: { title: (name) => (name ? `Node ${name}` : "Nodes"), view: NodeView },
  ledger: { title: () => "Ledger", view: LedgerView },
  trust: { title: () => "Trust in steps", view: TrustView },
  subscriptions: { title: () => "Subscriptions", view: SubscriptionsView },
};
