// Loads the page again when one of its modules did not come: a browser gives up a whole module graph for one connection that
// breaks, as all do when a laptop changes its network. Not a module itself.
"use strict";
const LOADING_TRIES = "loading tries"; // since the page last began
const LOADING_WAITS_MS = [250, 500, 1000];

addEventListener(
  "error",
  (event) => {
    if (!(event.target instanceof HTMLScriptElement) || event.target.type !== "module") return;
    const tried = Number(sessionStorage.getItem(LOADING_TRIES));
    const wait_ms = LOADING_WAITS_MS[tried];
    if (wait_ms !== undefined) {
      sessionStorage.setItem(LOADING_TRIES, String(tried + 1));
      setTimeout(() => location.reload(), wait_ms);
      return;
    }
    sessionStorage.removeItem(LOADING_TRIES);
    const said = document.createElement("p");
    said.className = "missing";
    said.role = "alert";
    said.textContent = "The page cannot be loaded: the server does not send all of it. Load it again once the server answers.";
    document.getElementById("app")?.replaceChildren(said);
    addEventListener("online", () => location.reload());
  },
  true,
);
