// Where the page begins.

import { h, render } from "preact";
import { comeBack } from "./account.js";
import { run, watchFleet } from "./live.js";
import { Shell } from "./shell.js";

sessionStorage.removeItem("loading tries"); // loading.js counts them
comeBack();
const root = document.getElementById("app");
if (root) render(h(Shell, {}), root);
void run();
void watchFleet();
