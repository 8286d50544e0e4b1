"""Provide `holdfast run`."""
