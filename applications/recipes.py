"""The former place of `keras_equiattn.applications.training.recipes`.

What imports `keras_equiattn.applications.recipes` gets the module from its new
place.
"""

import sys

from keras_equiattn.applications.training import recipes

sys.modules[__name__] = recipes
