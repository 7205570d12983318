pub mod inputs;
