"""What the package exports beside networks."""

import pytest

from keras_equiattn import applications


@pytest.mark.once
def test_datasets_and_recipes_are_found_in_the_package():
    from keras_equiattn.applications import datasets
    from keras_equiattn.applications import recipes

    assert callable(datasets.load)
    assert callable(recipes.get_recipe)
    assert {"datasets", "recipes"} <= set(applications.__all__)
