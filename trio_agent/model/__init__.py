"""Who answers: models, and the routes to them."""
