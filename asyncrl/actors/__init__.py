"""The processes of a run and their life cycle: controller, generators, supervisor."""
