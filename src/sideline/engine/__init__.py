"""Rounds, leases and the worker: how events get from Kafka into a home."""
