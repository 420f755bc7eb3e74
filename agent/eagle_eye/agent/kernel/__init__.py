"""The kernel's messages: which lines say that a device or the host fails."""
