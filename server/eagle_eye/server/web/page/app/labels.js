// What people read for states. Made by `python -m tests.page.api_types` of schema/labels.py; do not edit.

/** @type {Record<string, string>} */
export const STATE_LABELS = {
  "acting": "action under way",
  "false": "false alarm",
  "would_act": "would have acted",
  "awaiting": "awaiting approval",
  "observed": "running",
  "timeout": "timed out"
};
