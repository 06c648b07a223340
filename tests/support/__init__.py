"""Shared test support: real servers, real hosts."""
