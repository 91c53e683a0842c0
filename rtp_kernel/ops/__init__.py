"""One module per op family: signature, shapes, and the plain-torch reference that runs everywhere."""
