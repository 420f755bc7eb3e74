"""One file for each format in which an event is sent, and the guard of where it may go.

In: an event and a subscription. Out: a request.
"""
