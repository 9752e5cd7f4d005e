"""Video deblurring: the parts of the trainer; `main_train_vrt.py` and `main_test_vrt.py` put them together."""
