"""Delivery of events to subscribers: the outbox, retries, rate limits, and one file for each kind of notifier.

In: events committed to the store. Out: signed requests, and their outcomes. Decides nothing about nodes or jobs.
"""
