"""Many processes of one program: started together, fed, and ended together."""
