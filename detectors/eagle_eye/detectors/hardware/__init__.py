"""Devices and hosts that fail: facts of the driver, the kernel and the counters of links."""
