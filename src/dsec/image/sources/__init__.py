"""Where environments come from: each module fills a stage, and names what it would fill it with."""
