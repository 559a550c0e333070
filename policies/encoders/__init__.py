"""Encoders of observations, their choice by option and contract, and augmentations of scenes."""
