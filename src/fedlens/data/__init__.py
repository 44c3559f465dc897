"""The data floor: datasets as they are published, partitions of them over clients, batched transforms."""
