"""Provide `holdfast eval`."""
