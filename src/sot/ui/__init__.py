"""The page of `sot ui`: explanations in a browser, on this machine, with nothing from outside."""
