# What a farm that is given this repository builds.
import ./docs/demo
