"""What must hold before any test module is imported."""

import os

# Triton reads the switch when it is imported, which torch may do long before the kernels' own tests are collected.
os.environ.setdefault("TRITON_INTERPRET", "1")
