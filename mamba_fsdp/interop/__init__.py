"""Other people's weights, in and out: state-spaces and transformers forms."""
