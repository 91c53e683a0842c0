"""A model with a layer of every kind of state, whose outputs are exact integer functions of the tokens; its oracle."""
