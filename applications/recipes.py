"""The former place of `keras_equiattn.applications.training.recipes`.

Imports of `keras_equiattn.applications.recipes` get the module from its new
place.
"""

import sys

from keras_equiattn.applications.training import recipes

sys.modules[__name__] = recipes
