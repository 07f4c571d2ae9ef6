"""`python -m minirl.chat MODEL`: certify a tokenizer folder and show what a turn looks like."""

from minirl.chat.certify import main

if __name__ == "__main__":
    raise SystemExit(main())
