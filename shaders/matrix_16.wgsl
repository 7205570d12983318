// Cooperative matrices of 16 by 16. First in a module, where directives belong.

enable f16;
enable wgpu_cooperative_matrix;

const SIDE = 16u;
alias Left = coop_mat16x16<f16, A>;
alias Right = coop_mat16x16<f16, B>;
alias Sums = coop_mat16x16<f32, C>;
