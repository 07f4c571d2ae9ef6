"""Arithmetic in words, with a calculator: the demo that learns in minutes on two CPU cores."""
