"""Commands that measure: each prints a table and writes JSON; figures go into RESULTS.md."""
