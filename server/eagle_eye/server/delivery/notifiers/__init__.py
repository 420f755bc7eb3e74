"""One file for each format in which events are sent, and the check of target addresses.

In: an event and a subscription. Out: a request.
"""
