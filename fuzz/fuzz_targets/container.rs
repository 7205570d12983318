#![no_main]
tqcheck_fuzz::target!(tqcheck::fuzzing::CONTAINER);
