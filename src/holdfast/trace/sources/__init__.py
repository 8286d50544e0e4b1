"""Adapters: one module a form of job records."""
