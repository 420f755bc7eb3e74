// Runs before the first paint, so that who chose dark is not blinded by a white page first.
"use strict";
const chosenTheme = localStorage.getItem("theme");
if (chosenTheme === "light" || chosenTheme === "dark") document.documentElement.dataset["theme"] = chosenTheme;
