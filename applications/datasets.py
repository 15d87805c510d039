"""The former place of `keras_equiattn.applications.data.datasets`.

Imports of `keras_equiattn.applications.datasets` get the module from its new
place, and `python -m keras_equiattn.applications.datasets` still runs its
command line.
"""

import sys

from keras_equiattn.applications.data import datasets

if __name__ == "__main__":
    from keras_equiattn.applications.data.__main__ import main

    sys.exit(main())

sys.modules[__name__] = datasets
