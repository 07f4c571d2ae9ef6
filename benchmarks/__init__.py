"""Commands that measure: each prints a table and writes JSON; figures go into RESULTS.md."""

import minirl as minirl  # before torch, whose threads it tells how long to wait for one another
