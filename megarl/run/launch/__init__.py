"""Commands that start a job, a sweep, a bench, an explore program or the store, and orders of ``megarl scale``."""
