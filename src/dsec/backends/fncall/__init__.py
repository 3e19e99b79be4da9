"""fncall: stateless calls into containers made before; a service over another backend's instances (ruling 23)."""
