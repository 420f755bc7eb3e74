"""Delivery of events to subscribers: the outbox, retries, rate limits, and the formats of messages.

In: events committed to the store. Out: signed requests, and their outcomes. Decides nothing about nodes or jobs.
"""
