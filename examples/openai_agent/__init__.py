"""An agent of a framework that knows no more of minirl than a base_url."""
