"""Provide `holdfast profile`."""
