"""Events to subscribers: the outbox, retries, rate limits, and one file for each kind of notifier.

In: events committed to the store. Out: signed requests, and what became of each. Decides nothing about nodes or jobs.
"""
