"""A local page to look at what a run did: `python -m minirl.view RUN`."""
