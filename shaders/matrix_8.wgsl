// Cooperative matrices of 8 by 8. First in a module, where directives belong.

enable f16;
enable wgpu_cooperative_matrix;

const SIDE = 8u;
alias Left = coop_mat8x8<f16, A>;
alias Right = coop_mat8x8<f16, B>;
alias Sums = coop_mat8x8<f32, C>;
