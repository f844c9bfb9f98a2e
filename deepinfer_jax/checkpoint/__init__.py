"""Reading and writing checkpoints: the released safetensors files and the trees of parameters made from them."""
