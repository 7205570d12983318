#![no_main]
tqcheck_fuzz::target!(tqcheck::fuzzing::DECODE_DIFFERENTIAL);
